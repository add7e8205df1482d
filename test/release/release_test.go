package release

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const repository = "../.."

// run runs a program in a folder and returns its stdout.
func run(t *testing.T, dir, program string, args ...string) string {
	t.Helper()
	return runWith(t, "", dir, program, args...)
}

// runWith is run with a text on stdin.
func runWith(t *testing.T, stdin, dir, program string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Stdin, cmd.Dir, cmd.Stderr = strings.NewReader(stdin), dir, t.Output()
	cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH=1700000000")
	out, err := cmd.Output()
	require.NoError(t, err, "%s %v", program, args)
	return string(out)
}

// needGNU skips the test where the programs are missing that tools/release wants.
func needGNU(t *testing.T) {
	t.Helper()
	version, err := exec.CommandContext(t.Context(), "tar", "--version").Output()
	if err != nil || !strings.Contains(string(version), "GNU tar") {
		t.Skip("tools/release wants GNU tar")
	}
}

// The archive of a folder has the same bytes whenever and by whomever its files were written.
func TestArchiveHasTheSameBytes(t *testing.T) {
	t.Parallel()
	needGNU(t)
	var archives []string
	for i, names := range [][]string{{"b", "a/c", "run"}, {"run", "a/c", "b"}} {
		dir := filepath.Join(t.TempDir(), "dpserve")
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "a"), []os.FileMode{0o755, 0o700}[i]))
		for _, name := range names {
			path, mode := filepath.Join(dir, name), []os.FileMode{0o644, 0o600}[i]
			if name == "run" {
				mode |= 0o100
			}
			require.NoError(t, os.WriteFile(path, []byte(name), mode))
			at := time.Unix(int64(1e9*(i+1)), 0)
			require.NoError(t, os.Chtimes(path, at, at))
		}
		archive := filepath.Join(t.TempDir(), "dpserve.tar.gz")
		run(t, repository, "tools/release", "pack", dir, archive)
		text, err := os.ReadFile(archive)
		require.NoError(t, err)
		archives = append(archives, string(text))
		listed := run(t, ".", "tar", "tvzf", archive)
		assert.Regexp(t, `(?m)^-rw-r--r-- 0/0 .* 2023-11-14 .* dpserve/a/c$`, listed)
		assert.Regexp(t, `(?m)^-rwxr-xr-x 0/0 .* dpserve/run$`, listed)
	}
	assert.Equal(t, archives[0], archives[1])
}

// The parts of a binary are Go's library and its modules, with their hashes of go.sum.
func TestListOfParts(t *testing.T) {
	t.Parallel()
	needGNU(t)
	info := "bin/dpserve: go1.26.8\n\tpath\tgithub.com/dpserve/dpserve/cmd/dpserve\n" +
		"\tmod\tgithub.com/dpserve/dpserve\tv1.2.3\t\n" +
		"\tdep\tgithub.com/spf13/cobra\tv1.10.2\th1:a+/b=\n\tdep\tgolang.org/x/sys\tv0.1.0\th1:c=\n" +
		"\tbuild\t-trimpath=true\n"
	type property struct{ Name, Value string }
	type part struct {
		Name, Version, PURL string
		Properties          []property
	}
	var got struct {
		BOMFormat, SpecVersion string
		Metadata               struct{ Component part }
		Components             []part
	}
	text := runWith(t, info, repository, "tools/release", "sbom", "v1.2.3")
	require.NoError(t, json.Unmarshal([]byte(text), &got), text)
	assert.Equal(t, "CycloneDX 1.5", got.BOMFormat+" "+got.SpecVersion)
	assert.Equal(t, part{"dpserve", "v1.2.3", "pkg:golang/github.com/dpserve/dpserve@v1.2.3", nil},
		got.Metadata.Component)
	assert.Equal(t, []part{
		{"std", "v1.26.8", "pkg:golang/std@v1.26.8", nil},
		{
			"github.com/spf13/cobra", "v1.10.2", "pkg:golang/github.com/spf13/cobra@v1.10.2",
			[]property{{"go.sum", "h1:a+/b="}},
		},
		{"golang.org/x/sys", "v0.1.0", "pkg:golang/golang.org/x/sys@v0.1.0", []property{{"go.sum", "h1:c="}}},
	}, got.Components)
}

// The manual page has a section for each command.
func TestManualPage(t *testing.T) {
	t.Parallel()
	needGNU(t)
	page := run(t, repository, "tools/release", "man", "docs/cli.md", "v1.2.3")
	assert.True(t, strings.HasPrefix(page, ".TH DPSERVE 1 \"\" \"dpserve v1.2.3\"\n.SH NAME\n"))
	source, err := os.ReadFile(filepath.Join(repository, "docs", "cli.md"))
	require.NoError(t, err)
	for _, m := range regexp.MustCompile(`(?m)^## (.+)$`).FindAllStringSubmatch(string(source), -1) {
		assert.Contains(t, page, "\n.SH "+strings.ReplaceAll(strings.ToUpper(m[1]), "-", `\-`)+"\n")
	}
	assert.NotContains(t, page, "`", "no mark of Markdown is left outside of the texts")
	assert.Equal(t, strings.Count(page, "\n.nf\n"), strings.Count(page, "\n.fi\n"))
}

// Every dependency comes from a registry, so that `go install` can build any version.
func TestModuleCanBeInstalled(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(repository, "go.mod"))
	require.NoError(t, err)
	assert.True(t, strings.HasPrefix(string(text), "module github.com/dpserve/dpserve\n"))
	assert.NotRegexp(t, `(?m)^\s*(replace|exclude)\b`, string(text))
}

// Two clones in two folders give the same bytes, and the binary of this machine runs from its archive.
func TestRelease(t *testing.T) {
	if os.Getenv("DPSERVE_RELEASE") == "" {
		t.Skip("builds every platform twice: make test-release")
	}
	needGNU(t)
	var sums []string
	var dist string
	for range 2 {
		clone := filepath.Join(t.TempDir(), "clone")
		run(t, ".", "git", "clone", "-q", repository, clone)
		run(t, clone, "tools/release")
		dist = filepath.Join(clone, "dist")
		text, err := os.ReadFile(filepath.Join(dist, "SHA256SUMS"))
		require.NoError(t, err)
		sums = append(sums, string(text))
	}
	assert.Equal(t, sums[0], sums[1])
	archives, err := filepath.Glob(filepath.Join(dist, "*-"+runtime.GOOS+"-"+runtime.GOARCH+".tar.gz"))
	require.NoError(t, err)
	require.Len(t, archives, 1)
	run(t, dist, "tar", "xzf", archives[0])
	folder := strings.TrimSuffix(archives[0], ".tar.gz")
	_, version, _ := strings.Cut(strings.TrimSpace(run(t, folder, "bin/dpserve", "--version")), " ")
	assert.Contains(t, filepath.Base(folder), "dpserve-"+version+"-")
	run(t, folder, "bin/dpserve", "validate", "examples/quickstart/app.yaml")
	for _, name := range []string{
		"LICENSE", "NOTICE", "README.md", "sbom.cdx.json", "man/man1/dpserve.1", "completions/dpserve.bash",
		"licences/github.com/hashicorp/raft/LICENSE",
	} {
		assert.FileExists(t, filepath.Join(folder, name))
	}
}
