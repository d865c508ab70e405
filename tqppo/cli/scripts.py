"""The scripts that `tqppo --show-completion SHELL` prints; `completions/` holds them as files."""

BASH = r"""
# bash completion for tqppo
_tqppo_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" value note head="" word
    word="${line##*[[:space:]]}"
    # Readline starts a new word after = and :, so only what follows the last of them is to be replaced.
    local breaks="${COMP_WORDBREAKS//[^=:]/}"
    if [[ -n "$breaks" && "$word" == *["$breaks"]* ]]; then
        head="${word%"${word##*["$breaks"]}"}"
    fi
    COMPREPLY=()
    while IFS=$'\t' read -r value note; do
        if [[ "$value" == ":files" ]]; then
            compopt -o default
            return 0
        fi
        COMPREPLY+=("${value#"$head"}")
        [[ "$value" == *[=.] ]] && compopt -o nospace
    done < <(_TQPPO_COMPLETE=bash _TQPPO_LINE="$line" "$1" 2>/dev/null)
}
complete -F _tqppo_completion tqppo
"""

ZSH = r"""
#compdef tqppo
# zsh completion for tqppo
_tqppo() {
    local line value note
    local -a values shown open_values open_shown
    line="${(j: :)${(@)words[1,CURRENT-1]}} $PREFIX"
    while IFS=$'\t' read -r value note; do
        if [[ "$value" == ":files" ]]; then
            compset -P '*='
            _files
            return
        fi
        if [[ "$value" == *[=.] ]]; then
            open_values+=("$value")
            open_shown+=("$value${note:+  -- $note}")
        else
            values+=("$value")
            shown+=("$value${note:+  -- $note}")
        fi
    done < <(_TQPPO_COMPLETE=zsh _TQPPO_LINE="$line" ${~words[1]} 2>/dev/null)
    (( $#values )) && compadd -l -d shown -a values
    (( $#open_values )) && compadd -l -S '' -d open_shown -a open_values
    return 0
}
if [[ "${funcstack[1]}" == "_tqppo" ]]; then
    _tqppo "$@"
else
    compdef _tqppo tqppo
fi
"""

FISH = r"""
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
"""

BY_SHELL = {"bash": BASH, "zsh": ZSH, "fish": FISH}

# Where each shell looks by itself, and what is left to do.
PLACES = {
    "bash": (
        "~/.local/share/bash-completion/completions/tqppo",
        "open a new shell (without the bash-completion package, add `source {path}` to ~/.bashrc)",
    ),
    "zsh": (
        "~/.zfunc/_tqppo",
        "add `fpath+=({folder}); autoload -Uz compinit; compinit` to ~/.zshrc and open a new shell",
    ),
    "fish": ("~/.config/fish/completions/tqppo.fish", "open a new shell"),
}
