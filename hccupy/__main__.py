"""python -m hccupy"""

from .cli import main

main()
