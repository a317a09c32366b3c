"""What a run is: the YAML file as checked models, its errors, and the records that travel. Imports no torch."""
