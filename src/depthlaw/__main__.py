from depthlaw.platform.cli import main

main()
