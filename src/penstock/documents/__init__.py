"""JSON that somebody else may have written, read with bounds: its size, its depth, its numbers, its types.

    text     a file of a bounded size; JSON of a bounded depth, without what JSON does not have
    typed    values against type hints: JSON into frozen dataclasses, with the place of what is wrong
    chrome   Chrome traces, written record by record

Whoever reads a document turns ``MalformedError`` into its own error, which names the file. May import: nothing.
"""
