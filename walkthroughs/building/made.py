"""Pages and charts that minimha's own commands make while the site is built."""


def setup(app):
    pass
