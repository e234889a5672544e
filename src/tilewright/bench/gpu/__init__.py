"""The benchmark on a GPU: its grid, the contenders, what is measured, and how it is shown."""
