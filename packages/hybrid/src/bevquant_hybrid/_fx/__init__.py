"""From a float model to a graph whose nodes know where they run."""
