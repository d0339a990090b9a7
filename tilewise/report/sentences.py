"""The text that the report embeds: sentences from one word to a long paragraph, and pairs of them.

Lengths differ so that a padded batch has rows of all kinds; the pairs have an answer that a reader
can judge without knowing the model.
"""

from __future__ import annotations

SENTENCES = (
    "Hello.",
    "The cat is sleeping on the sofa.",
    "A kitten naps on the couch.",
    "Interest rates were raised by half a point.",
    "The central bank made borrowing more expensive.",
    "How do I reset my password?",
    "I forgot my login and cannot get into my account.",
    "Which bus goes to the airport?",
    "Water boils at a lower temperature on a mountain.",
    "Because the air is thinner up there, tea brewed at four thousand metres is never really hot.",
    "She tuned the violin before the concert.",
    "The musician adjusted her instrument, listened, and adjusted it once more.",
    "He overslept and missed the train.",
    "Our train left without him, since his alarm had not rung.",
    "Bread needs flour, water, salt, yeast and time.",
    "Knead the dough until it is smooth, let it rise for an hour, and bake it in a hot oven.",
    "Rain.",
    "A storm is expected along the coast this weekend, with gusts strong enough to close bridges.",
    "The lighthouse keeper wrote down the wind every six hours for thirty-one years, and when his "
    "notebooks were found behind a wall they turned out to be the longest unbroken weather record "
    "on that stretch of the coast.",
    "Prime numbers become rarer, yet they never end.",
    "Suppose that there were only finitely many primes; multiply them all and add one, and no "
    "prime of the list divides the result, so the list was not complete.",
    "The museum is closed on Mondays.",
    "Please send the signed contract back by Friday.",
    "We await your signature on the agreement before the end of the week.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "Leaves make food from sunlight.",
    "The goalkeeper saved two penalties in the final.",
    "Nobody expected the visitors to win, least of all their own supporters, who had already begun "
    "to leave when the third goal went in during the last minute of extra time.",
    "Attention lets every word of a sentence look at every other word.",
    "A long sequence is costly for attention, because every token is compared with every other: "
    "twice the tokens make four times the comparisons. Working tile by tile does not change that "
    "number, but it changes what is kept. The scores of one tile are made, used and forgotten, "
    "while a running maximum and a running sum carry what later tiles need to know; so memory "
    "grows with the length of the text and no longer with its square, and a text ten times as "
    "long needs ten times the memory instead of a hundred times.",
    "Do not touch the stove, it is still hot.",
    "The recipe says to wait, but the children are hungry now.",
    "An old map showed an island that nobody has found since.",
    "Sailors reported the island for two centuries before a survey removed it from the charts.",
    "Seventeen.",
    "The lift is out of order, so take the stairs.",
)

# Indices of sentences that mean much the same, and of some that do not.
PAIRS = ((1, 2), (3, 4), (5, 6), (10, 11), (24, 25), (1, 3), (5, 14), (19, 26))

# What the quick report embeds: short, longer and in between.
QUICK = (0, 1, 2, 3, 4, 5, 6, 10, 11, 17, 18, 28)
QUICK_PAIRS = ((1, 2), (3, 4), (5, 6), (10, 11), (1, 3), (5, 10))
