"""The words of the drawn scenes: what is printed in them, and what they are described with.

Printed words are in capitals, in the pictures and in the text, and nothing else is: a tokenizer that leaves runs of
capitals in single letters spells them, and so a model learns to read them.
"""

from collections.abc import Sequence
from random import Random

COLOURS = {
    "red": (214, 40, 40),
    "orange": (244, 136, 26),
    "yellow": (242, 216, 48),
    "green": (46, 156, 66),
    "blue": (42, 88, 212),
    "purple": (132, 56, 168),
    "pink": (246, 146, 194),
    "brown": (128, 78, 40),
    "black": (28, 28, 30),
    "white": (248, 248, 248),
}
WALLS = {
    "cream": (226, 214, 186),
    "grey": (182, 184, 190),
    "azure": (188, 212, 236),
    "mint": (196, 226, 204),
    "rose": (230, 200, 206),
}
ROOM_THINGS = ("ball", "box", "cone", "star", "heart", "ring", "cross", "moon")
STREET_THINGS = ("car", "bus", "house", "tree", "lamp", "boat")
THINGS = (*ROOM_THINGS, *STREET_THINGS)
SIZES = ("small", "large")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
POSITIONS = (
    "top left", "top centre", "top right",
    "middle left", "centre", "middle right",
    "bottom left", "bottom centre", "bottom right",
)  # fmt: skip
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DISHES = _words("""
SOUP SALAD PASTA PIZZA RICE FISH STEAK BURGER OMELET BREAD CHEESE HAM EGGS BACON TOAST CURRY STEW PIE CAKE TART
FLAN FRUIT MELON APPLE GRAPES SORBET MOUSSE WAFFLE CREPE FRIES BEANS TACO WRAP SUSHI NOODLE TOFU SALMON SHRIMP
LAMB DUCK PORK BEEF OLIVES PICKLE HONEY YOGURT MUFFIN COOKIE SCONE BAGEL
""")
DRINKS = _words("""
TEA COFFEE WATER JUICE MILK COCOA BEER WINE CIDER SODA LATTE MOCHA TONIC PUNCH SHAKE LEMON MINT GINGER COLA ICE
""")
GOODS = _words("""
HAT SCARF GLOVES SOCKS SHOES BOOTS SHIRT JACKET COAT BELT BAG WALLET WATCH RING MAP BOOK PEN PAPER STAMP CARD
LAMP VASE BOWL CUP PLATE KNIFE FORK SPOON SOAP TOWEL BRUSH COMB CANDLE MIRROR CLOCK RADIO CAMERA TOY DOLL KITE
BALL PUZZLE GUITAR DRUM FLUTE ROPE TENT STOVE TORCH BATTERY
""")
TOWNS = _words("""
PARIS LYON NICE LILLE NANTES RENNES TOURS DIJON METZ NANCY BREST CAEN ROUEN REIMS LEHAVRE AVIGNON ARLES CANNES
TOULON NIMES BERN BASEL ZURICH GENEVA MILAN TURIN ROME NAPLES VENICE GENOA PISA SIENA MADRID LISBON PORTO
SEVILLE VIENNA LINZ GRAZ PRAGUE BRNO BERLIN BONN ULM TRIER KOELN ESSEN GHENT BRUGES LONDON BATH YORK OXFORD
DOVER LEEDS DUBLIN CORK OSLO BERGEN MALMO AARHUS TURKU RIGA VILNIUS WARSAW KRAKOW ATHENS SOFIA
""")
SIGNS = _words("""
EXIT ENTRY OPEN CLOSED PUSH PULL STOP TAXI BUS TRAIN METRO HOTEL BANK POST POLICE MUSEUM PARK BEACH TOILET
TICKETS PARKING AIRPORT HARBOUR STATION MARKET SCHOOL LIBRARY THEATRE CINEMA BAKERY PHARMACY BUTCHER FLORIST
GARAGE LIFT STAIRS GATE PLATFORM CUSTOMS DANGER SLOW QUIET PRIVATE NORTH SOUTH EAST WEST CENTRE BRIDGE CASTLE
CHURCH TOWER GARDEN HOSPITAL DOCTOR DENTIST KITCHEN OFFICE
""")
SYLLABLES = _words("""
BA BE BO CA CO DA DE DI FA FE GA GO HI JO JU KA KE LA LE LO LU MA MI MO NA NE NO PA PE PO QUA RA RE RI RO SA SE
SI TA TE TI TO VA VE VI WA WE XA YO ZE ZO
""")
ENDS = tuple("NRSTLXMKD")
MENU_TITLES = ("MENU", "CAFE", "LUNCH", "DINNER", "BRUNCH", "SNACKS", "BAR", "BISTRO", "TODAY", "SPECIALS")
BOARD_TITLES = ("TRAINS", "BUSES", "BOATS", "FLIGHTS", "TRAMS", "COACHES")


def invented(draw: Random) -> str:
    """A word of two or three syllables that no list has: whoever reads it must read its letters."""
    return "".join(draw.choice(SYLLABLES) for _ in range(draw.choice((2, 2, 3)))) + draw.choice([*ENDS, "", "", ""])


def printed(draw: Random, words: Sequence[str], count: int, new: float = 0.2) -> list[str]:
    """`count` different words, a share `new` of them invented."""
    chosen: list[str] = []
    while len(chosen) < count:
        word = invented(draw) if draw.random() < new else draw.choice(words)
        if word not in chosen and len(word) <= 8:
            chosen.append(word)
    return chosen


def price(draw: Random) -> str:
    """Of 1.00 to 29.90."""
    whole = draw.randint(1, 9) if draw.random() < 0.6 else draw.randint(10, 29)
    return f"{whole}.{draw.choice(('00', '20', '25', '40', '50', '60', '75', '80', '90', '95'))}"


def time_of_day(draw: Random) -> str:
    """From 00:00 to 23:59."""
    return f"{draw.randint(0, 23):02d}:{draw.randint(0, 59):02d}"


def article(noun: str) -> str:
    """The noun phrase with "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
