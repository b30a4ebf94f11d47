"""Gear Loader beside other libraries. Each module needs the library of its name; importing this package needs none."""
