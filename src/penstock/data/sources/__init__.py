"""Sources of documents: one reader per kind of file, all behind ``Reader``. Each reads from a cursor on.

May import: ``config``, ``errors``. ``find.open_source`` decides which reader a path gets.
"""
