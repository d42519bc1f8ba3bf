"""Compare a model's next words with the grammar's: the table in ``minimha.models.world``.

python tests/world/judge.py
"""

from minimha.models import world
from minimha.models.world.questions import RELATIONS, questions, score


def main() -> None:
    model = world.load()
    for relation in RELATIONS:
        cells = [score(model, questions(relation, before=before)) for before in (0, 1)]
        figures = "".join(f"{cell.right:<8.3f}{cell.largest:<10.3f}" for cell in cells)
        print(f"{relation:24}{figures}".rstrip())


if __name__ == "__main__":
    main()
