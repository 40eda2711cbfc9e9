"""Publications: changed rows and dense weights out of a trainer, over a bus, and into whoever reads it."""
