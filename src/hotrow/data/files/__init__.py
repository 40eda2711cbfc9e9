"""Files: Parquet and delimited text as one resumable stream of batches.

    listing.py        which files, in which order, and a stamp of their names and sizes
    chunks.py         Chunk, Span, RowOffsets, and the Reader protocol of a file format
    parquet.py        the Parquet reader, and the source `parquet`
    text.py           the text reader, and the source `text`
    text_layouts.py   columns of Criteo's, Avazu's and other text files
    lines.py          blocks of whole lines, with the offset and number of each
    parse.py          lines to typed columns, with a message for each bad line
    file_source.py    FileSource: files to chunks to features to batches, with cursors
    file_units.py     units of work for any worker (see data/split.py)
    strided_files.py  every N-th batch, without decoding the others (see data/strided.py)

Each pass runs on one thread. A new format is a new Reader.
"""
