"""The wire contracts of rollgrid: pure data, importing msgspec and the standard library only.

Everything that crosses a process boundary is a frozen struct of this package, every subject is
built in `subjects`, every stream and consumer is declared in `topology`, every Redis key in
`keys`, every archive column in `columns`.  Nothing here performs I/O.
"""

SCHEMA_VERSION = 1
"""Version written into every message header (`Rg-Schema`); readers refuse newer ones."""
