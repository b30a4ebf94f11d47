def command(): pass
