"""Checkpoints: everything that decides what training computes next, as one folder that is complete or absent.

Files, in reading order:
    manifest.py         the folder's layout; reading and verifying a checkpoint without a trainer
    saving.py           capture at a step boundary, write into a draft, publish by a rename
    background_save.py  one save at a time, in the background of training
    loading.py          loads a checkpoint into a trainer; resumes from the newest readable one
    row_logs.py         logs with which a checkpoint writes only changed rows
    state_encoding.py   nested optimizer state as JSON and tensors, without pickle
    durable_files.py    make, write, sync, rename, remove: safe against power cuts

The format is docs/formats/checkpoint.md. Imported by train, inspect, job and serve/repository. `capture` and loading
run on the training thread, `write` on a background thread. Any thread may read a manifest.
"""
