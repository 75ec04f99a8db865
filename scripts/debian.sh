# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Sourced, after cargo.sh: defines `debian_apt SUITE... -- COMMAND...`, which runs apt-get,
# apt-cache and the like on Debian suites other than this machine's.
#
# The sources are the machine's with other suites. Package lists and cache are below target/debian/;
# the machine's apt stays unchanged.

debian_state=$(realpath -m "${CARGO_TARGET_DIR:-target}")/debian

# Prints the machine's source entry for its own Debian release (deb822 or one line) with suites $1.
debian_sources() {
    local suites=$1 release file
    # shellcheck source=/dev/null
    release=$(. /etc/os-release && [ "$ID" = debian ] && echo "$VERSION_CODENAME") || return
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -f "$file" ] || continue
        awk -v RS= -v release="$release" -v suites="$suites" '
            function wanted() {
                return match(paragraph, /\nSuites:[^\n]*/) &&
                    index(substr(paragraph, RSTART + 8, RLENGTH - 8) " ", " " release " ") &&
                    paragraph ~ /\nTypes:[^\n]* ?deb( |\n)/ && paragraph !~ /\nEnabled: *no/
            }
            { paragraph = "\n" $0 "\n" }
            wanted() {
                # Targets: no other index files of the archive, such as icons.
                print "Types: deb deb-src\nSuites: " suites \
                    "\nComponents: main\nTargets: Packages Sources"
                nr = split($0, lines, "\n")
                for (i = 1; i <= nr; i++) {
                    if (lines[i] ~ /^#/) continue
                    if (lines[i] !~ /^[ \t]/)
                        kept = lines[i] !~ /^(Types|Suites|Components|Targets):/
                    if (kept) print lines[i]
                }
                found = 1
                exit
            }
            END { exit !found }
        ' "$file" && return
    done
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ -f "$file" ] || continue
        # deb [signed-by=/a/keyring] URI RELEASE COMPONENT...
        sed -n -E "s/^deb +(\[([^]]*)\] +)?([^ ]+) +$release +main.*/\3 \2/p" "$file" |
            awk -v suites="$suites" '
                {
                    print "Types: deb deb-src\nSuites: " suites \
                        "\nComponents: main\nTargets: Packages Sources\nURIs: " $1
                    for (i = 2; i <= NF; i++)
                        if (sub(/^signed-by=/, "", $i)) print "Signed-By: " $i
                    found = 1
                    exit
                }
                END { exit !found }
            ' && return
    done
    return 1
}

debian_apt() {
    local suites=() dir sources
    while [ "$1" != -- ]; do
        suites+=("$1")
        shift
    done
    shift
    dir=$debian_state/$(IFS=+ && echo "${suites[*]}")
    builder mkdir -p "$dir"/{lists,cache/archives}/partial
    sources=$(debian_sources "${suites[*]}") || {
        echo "The lists of apt's sources here have no Debian release to take ${suites[*]} from." >&2
        return 1
    }
    # apt tells the format by the file name's suffix.
    builder tee "$dir/debian.sources" <<<"$sources" >/dev/null
    # Read after the machine's settings (e.g. proxies), which could undo these or clean the cache.
    builder tee "$dir/main.conf" >/dev/null <<-EOF
	#clear APT::Update::Pre-Invoke;
	#clear APT::Update::Post-Invoke;
	#clear APT::Update::Post-Invoke-Success;
	#clear APT::Default-Release;
	Dir::Etc::sourcelist "$dir/debian.sources";
	Dir::Etc::sourceparts "/dev/null";
	Dir::Etc::preferencesparts "/dev/null";
	Dir::State::lists "$dir/lists";
	Dir::Cache "$dir/cache";
	Acquire::Languages "none";
	APT::Sandbox::User "root";
	EOF
    builder tee "$dir/apt.conf" <<<"Dir::Etc::main \"$dir/main.conf\";" >/dev/null
    # Lists older than a day may name files that were removed.
    if [ -z "$(find "$dir/updated" -mmin -1440 2>/dev/null)" ]; then
        echo "Getting the package lists of Debian's ${suites[*]}." >&2
        builder env APT_CONFIG="$dir/apt.conf" apt-get -q update --error-on=any >"$dir/update.log" 2>&1 || {
            echo "apt-get update failed; $dir/update.log has what it said." >&2
            return 1
        }
        builder touch "$dir/updated"
    fi
    builder env APT_CONFIG="$dir/apt.conf" "$@"
}
