"""Tables written as data sets that other libraries read: `Table.export`, and `register` for formats of your own."""

from gear_loader.exports.formats import register

__all__ = ["register"]
