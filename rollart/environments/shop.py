"""A shop in text, after WebShop (arXiv 2207.01206): find and buy the product that an instruction describes.

The catalogue is generated (1,200 products by default): a category, a brand, a material and other attributes, options
to choose (colour, size), a price.  The policy acts as in WebShop: ``search[words]`` on the search page, ``click[…]``
on what a page offers: a product's number, an option, ``Next >``, ``< Prev``, ``Back to Search``, ``Buy Now``.  Buying
ends the episode with WebShop's graded reward:

    type match · (attributes that match + options that match + price kept) / (attributes + options + 1)

An instruction is made from a product of the catalogue, so that a purchase worth 1 exists (``Shop.solution``).
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rollart.environments.environment import Environment, Turn
from rollart.environments.splits import draw

__all__ = ["Product", "Shop", "catalogue"]

CATEGORIES = {
    "shoes": ("trail running shoes", "walking shoes", "canvas sneakers", "leather boots", "slippers"),
    "clothing": ("rain jacket", "hooded sweatshirt", "linen shirt", "wool socks", "yoga pants"),
    "kitchen": ("water bottle", "frying pan", "coffee grinder", "cutting board", "lunch box"),
    "home": ("desk lamp", "throw blanket", "curtain panel", "storage basket", "wall clock"),
    "electronics": ("phone case", "usb cable", "wireless mouse", "laptop sleeve", "headphones"),
}
BRANDS = (
    "Alder",
    "Brightway",
    "Corvo",
    "Dunlin",
    "Estuary",
    "Fennel",
    "Granite",
    "Harrow",
    "Isle",
    "Juniper",
)
ATTRIBUTES = {
    "shoes": ("waterproof", "lightweight", "slip resistant", "arch support", "wide fit", "breathable"),
    "clothing": ("machine washable", "waterproof", "stretch", "organic cotton", "quick drying", "reflective"),
    "kitchen": ("dishwasher safe", "bpa free", "non stick", "stainless steel", "leak proof", "compact"),
    "home": ("energy efficient", "machine washable", "handmade", "foldable", "battery powered", "silent"),
    "electronics": ("fast charging", "shock proof", "bluetooth", "foldable", "noise cancelling", "compact"),
}
COLOURS = ("black", "white", "navy", "red", "olive", "grey", "teal", "sand")
SIZES = {
    "shoes": ("7", "8", "9", "10", "11"),
    "clothing": ("small", "medium", "large", "x-large"),
    "kitchen": ("small", "medium", "large"),
    "home": ("small", "large"),
    "electronics": ("standard", "large"),
}
PAGE = 10
ACTION = re.compile(r"(search|click)\[([^\]]*)\]", re.IGNORECASE)
WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Product:
    """What the shop sells."""

    number: str
    kind: str
    group: str
    title: str
    attributes: tuple[str, ...]
    colours: tuple[str, ...]
    sizes: tuple[str, ...]
    price: float

    @property
    def options(self) -> tuple[str, ...]:
        """What can be chosen on its page."""
        return (*self.colours, *self.sizes)


@dataclass(frozen=True, slots=True)
class Goal:
    """What an instruction asks for."""

    kind: str
    attributes: tuple[str, ...]
    colour: str
    size: str
    price: float
    product: str
    """It was made from this one."""


class Catalogue:
    """Products, and a search over their titles and attributes (BM25, with k1 = 1.2 and b = 0.75)."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = {product.number: product for product in products}
        self._counts = {p.number: Counter(_words(f"{p.title} {' '.join(p.attributes)}")) for p in products}
        self._lengths = {number: sum(counts.values()) for number, counts in self._counts.items()}
        self._mean = sum(self._lengths.values()) / len(products)
        self._having: dict[str, list[str]] = {}
        for number, counts in self._counts.items():
            for word in counts:
                self._having.setdefault(word, []).append(number)

    def search(self, query: str) -> list[str]:
        """Numbers of the products that have a word of ``query``, the best first; 50 at most."""
        scores: dict[str, float] = {}
        for word in _words(query):
            having = self._having.get(word, [])
            rarity = math.log(1 + (len(self.products) - len(having) + 0.5) / (len(having) + 0.5))
            for number in having:
                often, length = self._counts[number][word], self._lengths[number] / self._mean
                score = rarity * often * 2.2 / (often + 1.2 * (0.25 + 0.75 * length))
                scores[number] = scores.get(number, 0.0) + score
        return sorted(scores, key=lambda number: (-scores[number], number))[:50]


@functools.cache
def catalogue(products: int, seed: int) -> Catalogue:
    """The shop's; every episode of a process shares it."""
    rng = random.Random(f"shop {seed}")
    return Catalogue([_product(rng, index) for index in range(products)])


def _product(rng: random.Random, index: int) -> Product:
    group = rng.choice(list(CATEGORIES))
    kind = rng.choice(CATEGORIES[group])
    attributes = tuple(sorted(rng.sample(ATTRIBUTES[group], rng.randint(2, 4))))
    shown = rng.sample(attributes, 2)
    title = f"{rng.choice(BRANDS)} {kind}, {shown[0]}, {shown[1]}, model {rng.randint(100, 999)}"
    colours = tuple(sorted(rng.sample(COLOURS, rng.randint(2, 5))))
    sizes = SIZES[group][: rng.randint(2, len(SIZES[group]))]
    return Product(
        f"B{index:05d}", kind, group, title, attributes, colours, sizes, round(rng.uniform(5, 150), 2)
    )


class Shop(Environment):
    """A shop with ``products`` products, the same for every episode with the same ``catalogue_seed``."""

    def __init__(self, products: int = 1200, catalogue_seed: int = 0) -> None:
        if products < 20:
            raise ValueError(f"products is {products}; a shop has at least 20")
        self._catalogue = catalogue(products, catalogue_seed)
        self.goal: Goal
        self._results: list[str] = []
        self._page = 0
        self._product: Product | None = None
        self._chosen: dict[str, str] = {}

    def reset(self, seed: int, split: str) -> str:
        """Draw the instruction that ``seed`` and ``split`` name."""
        self._instruction = draw(self._candidate, random.Random(seed), split)
        return self._show_search()

    def step(self, action: str) -> Turn:
        """Search or click; what is no action of the page shows the page again."""
        found = ACTION.search(action)
        if found is None:
            return Turn(f"No action: write search[words] or click[…].\n{self._show()}")
        verb, argument = found[1].lower(), found[2].strip()
        if verb == "search":
            self._results, self._page, self._product = self._catalogue.search(argument), 0, None
            return Turn(self._show())
        return self._click(argument)

    def solution(self) -> list[str]:
        """Actions that earn a reward of 1."""
        product = self._catalogue.products[self.goal.product]
        results = self._catalogue.search(product.title)
        pages = results.index(product.number) // PAGE
        clicks = [*["Next >"] * pages, product.number, self.goal.colour, self.goal.size, "Buy Now"]
        return [f"search[{product.title}]", *(f"click[{each}]" for each in clicks)]

    def reward(self, product: Product, chosen: Sequence[str]) -> float:
        """Of buying ``product`` with the options ``chosen``; by WebShop's formula."""
        goal = self.goal
        same_kind = 1.0 if product.kind == goal.kind else 0.1 if product.group == _group(goal.kind) else 0.0
        matches = sum(attribute in product.attributes for attribute in goal.attributes)
        matches += (goal.colour in chosen) + (goal.size in chosen) + (product.price <= goal.price)
        return same_kind * matches / (len(goal.attributes) + 3)

    # --- pages ----------------------------------------------------------------------------------------

    def _candidate(self, rng: random.Random) -> str:
        product = self._catalogue.products[rng.choice(list(self._catalogue.products))]
        attributes = tuple(sorted(rng.sample(product.attributes, rng.randint(1, len(product.attributes)))))
        colour, size = rng.choice(product.colours), rng.choice(product.sizes)
        price = math.ceil(product.price / 10) * 10
        self.goal = Goal(product.kind, attributes, colour, size, price, product.number)
        wanted = f"{', '.join(attributes)} {product.kind}, colour {colour}, size {size}"
        return f"Find me {wanted}, and price lower than {price}.00 dollars."

    def _click(self, argument: str) -> Turn:
        words = argument.lower()
        product = self._product
        if product is not None and words == "buy now":
            reward = self.reward(product, list(self._chosen.values()))
            return Turn("Bought.", reward=reward, done=True, info={"success": float(reward == 1.0)})
        if words == "back to search":
            self._results, self._product = [], None
        elif words == "next >" and product is None and (self._page + 1) * PAGE < len(self._results):
            self._page += 1
        elif words == "< prev":
            if product is None:
                self._page = max(self._page - 1, 0)
            self._product = None
        elif product is not None and words in product.options:
            self._chosen["colour" if words in product.colours else "size"] = words
        elif product is None and argument.upper() in self._results:
            self._product, self._chosen = self._catalogue.products[argument.upper()], {}
        else:
            return Turn(f"There is no {argument!r} to click here.\n{self._show()}")
        return Turn(self._show())

    def _show(self) -> str:
        if self._product is not None:
            return self._show_product(self._product)
        return self._show_results() if self._results else self._show_search()

    def _show_search(self) -> str:
        return f"Instruction: {self._instruction}\n[Search]\n"

    def _show_results(self) -> str:
        shown = self._results[self._page * PAGE : (self._page + 1) * PAGE]
        pages = math.ceil(len(self._results) / PAGE)
        products = [self._catalogue.products[number] for number in shown]
        lines = [f"[{p.number}] {p.title} ${p.price:.2f}" for p in products]
        head = f"Instruction: {self._instruction}\n[Back to Search] Page {self._page + 1} of {pages}"
        moves = " ".join(["[< Prev]"] * (self._page > 0) + ["[Next >]"] * (self._page + 1 < pages))
        return "\n".join([head, *lines, moves, ""])

    def _show_product(self, product: Product) -> str:
        chosen = ", ".join(f"{name} {value}" for name, value in sorted(self._chosen.items())) or "nothing"
        return (
            f"Instruction: {self._instruction}\n[Back to Search] [< Prev]\n{product.title}\n"
            f"Features: {', '.join(product.attributes)}\nPrice: ${product.price:.2f}\n"
            f"colour: {' '.join(f'[{each}]' for each in product.colours)}\n"
            f"size: {' '.join(f'[{each}]' for each in product.sizes)}\nChosen: {chosen}\n[Buy Now]\n"
        )


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _group(kind: str) -> str:
    return next(group for group, kinds in CATEGORIES.items() if kind in kinds)
