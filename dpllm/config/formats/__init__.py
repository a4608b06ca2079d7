"""The formats of records (`catalogue`) and their base class."""
