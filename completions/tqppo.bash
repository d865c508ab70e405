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
