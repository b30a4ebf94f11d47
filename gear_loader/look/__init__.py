"""What is in a table, for people: `gear-loader look`."""
