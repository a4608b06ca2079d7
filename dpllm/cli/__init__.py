"""The command line: `program` puts the commands of the files beside it and of the methods together."""
