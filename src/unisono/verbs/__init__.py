"""The verbs of the command line. What a verb starts that imports torch is called `rank`."""
