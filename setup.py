from setuptools import find_packages, setup

# Metadata stands in pyproject.toml, which has no word for a package whose folder has another name
setup(packages=[*find_packages(include=['fastai_xla', 'fastai_xla.*']), 'fastai_xla.examples'], package_dir={'fastai_xla.examples': 'examples'})
