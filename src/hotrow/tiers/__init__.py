"""The tiers that hold rows: HBM, DRAM and SSD (`host`), and remote stores. Of the others a tier imports only `host`."""
