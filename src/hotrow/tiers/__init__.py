"""The tiers that hold rows: HBM, DRAM and SSD (`host`), and remote stores. Of the others a tier imports only `host`.

remote/tables.py has the order in which a read goes through all of them.
"""
