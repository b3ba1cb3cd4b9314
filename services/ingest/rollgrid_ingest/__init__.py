"""The only admission point of rollgrid: HTTP and queue doors, jobs out."""
