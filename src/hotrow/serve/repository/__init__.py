"""The repository: exported models on disk, as models, versions and files.

In reading order:
    manifest.py          the layout, the manifest with its checksums, opening and verifying versions
    export.py            writes a model as a version, completely or not at all
    history_layout.py    numbers, user features, aligned groups and largest lengths of a model that is exported
    row_files.py         writes a table's rows as files with values only
    releases.py          aliases, canary and shadow of a model: its releases.json
    from_checkpoint.py   exports a checkpoint without the program that trained it

serve/updates, execution and processes import it, and the command line. It imports serve/graph, serve/protocol and the
checkpoint formats of hotrow.train.

Threads: any thread may read; one process at a time exports into a model's folder.
"""
