int command_reference(int argc, char **argv);
int command_reference(int argc, char **argv) {
    (void)argc;
    (void)argv;
    return 0;
}
