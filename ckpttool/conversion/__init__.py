"""Convert checkpoints: plan, write and read back, receipt, reverse, fill a model, export."""
