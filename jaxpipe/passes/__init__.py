"""Pure passes over tables: valid in, valid out."""
