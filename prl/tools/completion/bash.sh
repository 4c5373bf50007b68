# Completes prl in bash: eval "$(prl completion bash)"
_prl() {
    local line="${COMP_LINE:0:COMP_POINT}" word typed=
    [[ $line =~ (\\.|[^[:space:]\\])*$ ]]
    word=${BASH_REMATCH[0]}
    # Where readline breaks words at = and :, it puts the reply behind the last of them.
    [[ $COMP_WORDBREAKS == *=* ]] && typed=${word%"${word##*[=:]}"}
    COMPREPLY=()
    while IFS= read -r word; do
        [[ $word == *[=.] ]] && compopt -o nospace 2>/dev/null
        # A name is a word, whatever a shell would take its signs for.
        [[ $word =~ ^[][A-Za-z0-9_./:=,+~@%-]*$ ]] || printf -v word %q "$word"
        COMPREPLY+=("${word#"$typed"}")
    done < <("$1" completion words "$line" 2>/dev/null)
}
complete -o default -F _prl prl
