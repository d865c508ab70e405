# fish completion for tqppo
function __tqppo_complete
    set -l program (string replace -r '^~' $HOME -- (commandline -opc)[1])
    set -lx _TQPPO_COMPLETE fish
    set -lx _TQPPO_LINE (commandline -cp | string collect)
    set -l answer ($program 2>/dev/null)
    if test "$answer[1]" = ":files"
        __fish_complete_path (commandline -ct)
    else
        printf '%s\n' $answer
    end
end
complete --command tqppo --no-files --arguments '(__tqppo_complete)'
