"""Generated agents of RL libraries, whose actions the libraries compute, and what ckpttool makes of them."""
