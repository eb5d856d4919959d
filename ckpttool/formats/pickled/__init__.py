"""What every format of plain pickles shares: who owns a file, its values as data, the walk to a tree."""
