"""What partita uses of libraries that is not public, so that an update of them changes one file."""
