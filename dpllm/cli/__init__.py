"""The command line: `program` combines the commands of this folder and of the methods."""
