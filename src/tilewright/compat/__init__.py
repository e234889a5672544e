"""Other libraries' attention functions, with their signatures, on tilewright's contract."""
