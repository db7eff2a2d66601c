"""Words that conversations are made of."""

from __future__ import annotations

from random import Random

from tessera.engine.builtin.training.conversation import Split, choose, draw, in_split

NAMES = (
    "Ada Alan Alba Alice Amir Amy Ana Anders Anna Anton Arun Astrid Ava Ben Berta Bilal Bob Boris Bruno Carla Carlos "
    "Carmen Cecil Chen Clara Claude Cora Cyril Dan Daria David Dennis Diana Dora Dylan Edgar Elena Eli Elsa Emil Emma "
    "Eric Erin Esther Eva Farid Felix Fiona Frank Frida Gabor Gemma George Gina Grace Greta Gus Hana Hans Hugo Ida Igor "
    "Ines Ingrid Iris Isaac Ivan Jack Jade James Jan Jana Jasper Jin Joan Joel Jonas Jose Judith Julia Karim Karl Kate "
    "Kenji Kim Klara Lana Lars Laura Lea Leon Lina Lisa Liu Luca Lucy Luis Lydia Mara Marco Maria Mark Marta Max Maya "
    "Mei Mila Milan Mina Mira Mona Nadia Nico Nina Noah Nora Olga Oliver Omar Oscar Otto Pablo Paul Pavel Peter Petra "
    "Pia Priya Quinn Rachel Ravi Rita Robert Rosa Ruth Sam Samir Sara Sergei Simon Sofia Stella Sven Tara Tariq Theo "
    "Thomas Tim Tina Tom Uma Ursula Vera Victor Viola Walter Wanda Will Xenia Yara Yusuf Yuki Zane Zara Zoe"
).split()
CITIES = (
    "Accra Amman Ankara Athens Austin Bamako Bergen Berlin Bern Bogota Bonn Boston Brno Cairo Cardiff Chennai Chicago "
    "Cork Dakar Dallas Delhi Denver Dhaka Dresden Dublin Durban Essen Geneva Genoa Ghent Graz Hague Hanoi Havana Helsinki "
    "Istanbul Jakarta Kabul Kigali Kyiv Kyoto Lagos Leeds Lima Lisbon London Lusaka Lyon Madrid Malaga Manila Miami Milan "
    "Minsk Mumbai Munich Nairobi Nantes Naples Nice Osaka Oslo Ottawa Paris Perth Porto Prague Quito Riga Rome Santiago "
    "Seattle Seoul Seville Sofia Split Sydney Tallinn Tampa Tokyo Toronto Tripoli Tunis Turin Utrecht Vienna Vilnius "
    "Warsaw Zagreb Zurich"
).split()
COLOURS = "amber black blue brown cyan golden green grey indigo ivory lilac orange pink purple red silver teal white yellow".split()
ANIMALS = (
    "badger bear beaver bird camel cat cow crab crow deer dog donkey duck eagle ferret fish fox frog goat goose hamster "
    "hare hen horse lamb lizard mole mouse otter owl parrot pig pigeon pony rabbit rat raven seal sheep snail snake spider "
    "swan tiger turtle whale wolf zebra"
).split()
FOODS = (
    "apples beans berries bread butter cake carrots cheese cherries chips corn curry dates eggs figs garlic grapes honey "
    "jam kale lemons lentils mangoes melons milk mushrooms noodles nuts oats olives onions oranges pancakes pasta peaches "
    "pears peas peppers pies pizza plums potatoes rice salad soup spinach tea toast tofu tomatoes waffles walnuts yogurt"
).split()
JOBS = (
    "actor artist baker barber builder butcher carpenter chemist clerk coach cook dancer dentist doctor driver editor "
    "engineer farmer fisher gardener guard judge lawyer librarian mechanic miner musician nurse painter pilot plumber "
    "poet porter printer sailor singer soldier surgeon tailor teacher vet waiter weaver writer"
).split()
OBJECTS = (
    "bag ball basket bell belt blanket book bottle bowl box broom brush bucket button camera candle cap card chair clock "
    "coat coin comb cup desk dish doll drum fan flag flute fork glass glove guitar hammer hat helmet jar jug kettle key "
    "kite knife ladder lamp letter lock map mirror mug nail needle net paint pan pen pencil phone pillow pipe plate pot "
    "purse radio ring rope ruler saw scarf shirt shoe shovel soap sock spoon stamp stool string tent ticket torch towel "
    "toy tray umbrella vase wallet watch wheel whistle"
).split()
PLACES = (
    "attic barn basement bathroom bedroom cabin cellar closet corridor drawer garage garden hall kitchen library lobby "
    "office pantry park shed shop stable station studio tower workshop yard"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
LANGUAGES = "Arabic Czech Danish Dutch English Finnish French German Greek Hindi Italian Japanese Korean Polish Spanish Swedish Turkish Welsh".split()
ADJECTIVES = (
    "bright broken cheap clean cold dark deep dry early empty fast flat fresh full gentle happy hard heavy hot huge kind "
    "large late light long loud low narrow new old plain poor proud quick quiet rare rich round sad sharp short slow small "
    "soft sour strong sweet tall thin tiny tired warm weak wet wide wild wise young"
).split()
TOPICS = (
    "algebra astronomy ballet banking biology botany chess climate coffee comets computers cricket democracy dinosaurs "
    "dreams earthquakes economics electricity evolution fashion football galaxies geology glaciers gravity history "
    "inflation jazz law lightning logic magnets medicine memory music oceans opera painting philosophy photography physics "
    "planets poetry politics psychology rainbows religion robots rockets sculpture taxes tennis tides trains travel "
    "vaccines volcanoes war weather wine"
).split()
NOUNS = sorted({*OBJECTS, *ANIMALS, *FOODS, *PLACES, *JOBS})

_ONSETS = (
    "b bl br c ch cl cr d dr dw f fl fr g gl gr h j k kn l m n p ph pl pr qu r s sc sh sk sl sm sn sp squ st str sw t th "
    "thr tr tw v w wh wr x y z"
).split()
_VOWELS = "a e i o u y a e i o u ai au aw ay ea ee ei eu ew ey ia ie io oa oi oo ou ow oy ua ue ui".split()
_CODAS = [""] * 12 + (
    "b bb bs c ce ch ck ct d dd de dge f ff ft g ge gh gs k ke ks l ld le lf lk ll lm lp ls lt m mb mp ms n nce nch nd ne "
    "ng nk ns nt p pe pp ps pt r rb rd re rf rg rk rl rm rn rp rs rt rth s se sh sk sm sp ss st t te th ts tt v ve w x y z"
).split()


def pseudo_word(rng: Random) -> str:
    """A pronounceable word that most likely is none."""
    if rng.random() < 0.15:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8)))
    syllables = rng.choice((1, 2, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def word(rng: Random, split: Split) -> str:
    """A noun, an adjective or an invented word."""
    kind = rng.random()
    if kind < 0.4:
        return choose(rng, split, NOUNS, "word")
    if kind < 0.5:
        return choose(rng, split, ADJECTIVES, "word")
    return draw(rng, split, pseudo_word, "word")


def noun(rng: Random, split: Split, items: list[str]) -> str:
    """One of `items`; most of the training draws are another word, so that no slot's words are learnt by heart: any, or
    one that begins like one of them and goes on otherwise, which has to be read to its end."""
    kind = rng.random() if split == "train" else 1.0
    if kind < 0.35:
        return word(rng, split)
    if kind < 0.6:
        known = [item for item in items if in_split(split, "word", item)]
        return draw(rng, split, lambda r: _crossed(r.choice(known), r.choice(known), r), "word")
    return choose(rng, split, items, "word")


def _crossed(one: str, other: str, rng: Random) -> str:
    """The beginning of one and the end of the other."""
    return one[: rng.randint(1, len(one) - 1)] + other[rng.randint(1, len(other) - 1) :]


def name(rng: Random, split: Split) -> str:
    """A person's name, sometimes an invented one."""
    if rng.random() < 0.5:
        return choose(rng, split, NAMES, "name")
    return draw(rng, split, lambda r: pseudo_word(r).capitalize(), "name")


def city(rng: Random, split: Split) -> str:
    """A city, sometimes an invented one."""
    if rng.random() < 0.5:
        return choose(rng, split, CITIES, "city")
    return draw(rng, split, lambda r: pseudo_word(r).capitalize(), "city")


def integer(rng: Random, split: Split, low: int, high: int) -> int:
    """An integer in [low, high]; half of the time of the lower digits counts, so that small ones occur."""
    return draw(
        rng, split, lambda r: r.randint(low, min(high, max(low, 10 ** r.randint(1, len(str(high)))))), "integer"
    )


def time_of_day(rng: Random, split: Split) -> str:
    return draw(rng, split, lambda r: f"{r.randint(0, 23):02d}:{r.randint(0, 11) * 5:02d}", "time")
