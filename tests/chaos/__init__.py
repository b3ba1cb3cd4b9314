"""The kill storm, and the checker that reads only what an outsider can see."""
