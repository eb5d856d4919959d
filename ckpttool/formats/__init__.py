"""One file per on-disk encoding: claims, reads and (where it can) writes."""
