from partita.cli.main import run

run()
