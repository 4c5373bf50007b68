#compdef prl
# Completes prl in zsh, after compinit: eval "$(prl completion zsh)"
_prl() {
    local -a whole open
    local word
    for word in ${(f)"$($words[1] completion words "${(j: :)words[1,CURRENT]}" 2>/dev/null)"}; do
        if [[ $word == *[=.] ]]; then open+=("$word"); else whole+=("$word"); fi
    done
    (( $#whole + $#open )) || { _files; return; }
    compadd -S '' -a open
    compadd -a whole
}
compdef _prl prl
