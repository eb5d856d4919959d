"""Generated agents of RL libraries, whose actions the libraries themselves compute, and what ckpttool makes of them."""
