"""Distinct pages of one template, which chains of band matches join."""

import random


def template_pages(count: int) -> list[str]:
    """Distinct pages of one template, whose similarities are about 0.6: chains of band matches join most of them."""
    chance = random.Random(1)
    template = ["".join(chance.choices("abcdefghijklm", k=chance.randint(3, 9))) for _ in range(90)]
    pages = []
    for number in range(count):
        words = list(template)
        words[5:21] = [f"{chance.randrange(10**5):05}x{number}" for _ in range(16)]
        pages.append(" ".join(words))
    return pages
