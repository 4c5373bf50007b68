# Completes prl in fish: prl completion fish | source
function __prl_words
    set -l found (prl completion words (commandline -cp | string collect) 2>/dev/null)
    if set -q found[1]
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c prl -f -a '(__prl_words)'
