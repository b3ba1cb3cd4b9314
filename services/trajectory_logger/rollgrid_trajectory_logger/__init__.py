"""The ledger of rollgrid: folds events, closes groups, archives them as Parquet."""
