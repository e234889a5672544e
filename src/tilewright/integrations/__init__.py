"""tilewright inside other libraries. Each module imports the library that it is named for."""
