package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
)

// repository is the path of the root, seen from this package.
const repository = "../.."

// pageRuns says how the commands in the blocks of a page are run. A page with such a block and without a line
// here fails TestEveryCommandBlockIsRun.
var pageRuns = map[string]func(*testing.T, []block){
	"README.md":              runREADME,
	"docs/api.md":            runAPIPage,
	"docs/cluster.md":        runClusterPage,
	"docs/coming-from.md":    runComingFromPage,
	"docs/lockstep.md":       runLockstepPage,
	"docs/operations.md":     runOperationsPage,
	"docs/prefill-decode.md": runPairsPage,
	"docs/router.md":         runRouterPage,
	"docs/routing.md":        runRoutingPage,
	"docs/tour.md":           runTourPage,
}

// A block is a fenced block of a page.
type block struct {
	page     string
	line     int // of its first line, from 1
	language string
	text     string
}

// A command is one line that a reader types.
type command struct {
	host   string // of its prompt; "" in a block of language sh, which has no prompts
	text   string
	output []string // that the page shows for it
}

// pages returns the pages that readers follow: the README, docs and the papers beside them.
func pages(t *testing.T) []string {
	t.Helper()
	docs, err := filepath.Glob(filepath.Join(repository, "docs", "*.md"))
	require.NoError(t, err)
	require.Greater(t, len(docs), 10)
	out := []string{"README.md", "CONTRIBUTING.md", "SECURITY.md"}
	for _, path := range docs {
		out = append(out, "docs/"+filepath.Base(path))
	}
	return out
}

// readPage returns the text of a page.
func readPage(t *testing.T, page string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, filepath.FromSlash(page)))
	require.NoError(t, err)
	return string(text)
}

// blocksOf returns the fenced blocks of a page.
func blocksOf(t *testing.T, page string) []block {
	t.Helper()
	var out []block
	inside := false
	number := 0
	for line := range strings.Lines(readPage(t, page)) {
		number++
		fence, isFence := strings.CutPrefix(strings.TrimSpace(line), "```")
		switch {
		case isFence && inside:
			inside = false
		case isFence:
			inside = true
			out = append(out, block{page: page, line: number + 1, language: fence})
		case inside:
			out[len(out)-1].text += line
		}
	}
	require.False(t, inside, "%s: a block does not end", page)
	return out
}

var prompt = regexp.MustCompile(`^([a-z][a-z0-9 -]*)\$ (.+)$`)

// commands returns what a reader types: every line of a block of language sh, and of a transcript every line
// behind a prompt like `gpu-1$ `.
func (b *block) commands() []command {
	var out []command
	for line := range strings.Lines(b.text) {
		line = strings.TrimRight(line, "\n")
		typed := prompt.FindStringSubmatch(line)
		switch {
		case b.language == "sh" && strings.TrimSpace(line) != "" && !strings.HasPrefix(line, "#"):
			out = append(out, command{text: line})
		case b.language == "text" && typed != nil:
			out = append(out, command{host: typed[1], text: typed[2]})
		case len(out) > 0:
			last := &out[len(out)-1]
			last.output = append(last.output, line)
		}
	}
	return out
}

// commandBlocks returns the blocks of a page that hold commands.
func commandBlocks(t *testing.T, page string) []block {
	t.Helper()
	var out []block
	for _, b := range blocksOf(t, page) {
		if len(b.commands()) > 0 {
			out = append(out, b)
		}
	}
	return out
}

// LG41, LG42: TestEveryCommandBlockIsRun runs the command blocks of all pages. The README, which takes
// longest, has a test of its own.
func TestEveryCommandBlockIsRun(t *testing.T) {
	t.Parallel()
	found := map[string]bool{}
	for _, page := range pages(t) {
		for _, b := range blocksOf(t, page) {
			// internal/engine/kvevents runs the program in Python
			assert.Contains(t, []string{"sh", "text", "yaml", "go", "python"}, b.language,
				"%s:%d: the language of a block says whether it is run", page, b.line)
		}
		blocks := commandBlocks(t, page)
		if len(blocks) == 0 {
			continue
		}
		found[page] = true
		run := pageRuns[page]
		if run == nil {
			t.Errorf("%s:%d: no test runs the commands of this page: add it to pageRuns", page,
				blocks[0].line)
			continue
		}
		if page == "README.md" {
			continue // TestREADME
		}
		t.Run(page, func(t *testing.T) {
			t.Parallel()
			if testing.Short() {
				t.Skip("starts real nodes")
			}
			run(t, blocks)
		})
	}
	for page := range pageRuns {
		assert.True(t, found[page], "%s has no command block any more", page)
	}
}

var codeSpan = regexp.MustCompile("`([^`\n]+)`")

// spans returns the code spans of a page that stand outside of blocks.
func spans(t *testing.T, page string) []string {
	t.Helper()
	outside := regexp.MustCompile("(?ms)^```.*?^```").ReplaceAllString(readPage(t, page), "")
	var out []string
	for _, m := range codeSpan.FindAllStringSubmatch(outside, -1) {
		out = append(out, m[1])
	}
	return out
}

// TestPagesNameCommandsThatExist: what a page calls `dpserve …` in its text has a command, flags and
// arguments that exist; `make …` has a target, and `go test` and `go run` have a folder.
func TestPagesNameCommandsThatExist(t *testing.T) {
	makefile := readPage(t, "Makefile")
	folder := regexp.MustCompile(`(?:^| )\./([a-z][a-z0-9/]*[a-z0-9])`)
	checked := 0
	for _, page := range pages(t) {
		for _, span := range spans(t, page) {
			line := regexp.MustCompile(`^([A-Z_]+=\S+ )+`).ReplaceAllString(span, "")
			switch {
			case strings.Contains(span, "…") || strings.Contains(span, "..."):
				continue // a part of a message or of a command
			case strings.HasPrefix(line, "dpserve ") || strings.HasPrefix(line, "bin/dpserve "):
				require.NoError(t, parseCommandLine(t, line), "%s: `%s`", page, span)
			case strings.HasPrefix(line, "make "):
				target := strings.Fields(line)[1]
				assert.Contains(t, makefile, "\n"+target+":", "%s: `%s`", page, span)
			case strings.HasPrefix(line, "go test ") || strings.HasPrefix(line, "go run "):
				for _, name := range folder.FindAllStringSubmatch(line, -1) {
					assert.DirExists(t, filepath.Join(repository, name[1]), "%s: `%s`", page, span)
				}
			default:
				continue
			}
			checked++
		}
	}
	assert.Greater(t, checked, 50, "this test no longer finds the commands of the pages")
}

// parseCommandLine reports what is wrong with a command line: an unknown command or flag, or arguments that
// the command does not take. Optional parts in brackets count as written.
func parseCommandLine(t *testing.T, line string) error {
	t.Helper()
	args := strings.Fields(strings.NewReplacer("[", "", "]", "").Replace(line))[1:]
	root := newRoot(newCLI(t).env)
	found, rest, err := root.Find(arrange(root, args))
	if err == nil && found == root && len(rest) > 0 {
		err = unknownCommand(root, rest[0])
	}
	if err != nil {
		return err
	}
	if err := found.ParseFlags(rest); err != nil {
		return err
	}
	if found.Args == nil || len(found.Flags().Args()) == 0 {
		return nil // a command without its arguments is named, not called
	}
	return found.Args(found, found.Flags().Args())
}

// TestHelpExamples: the examples of the help texts name commands and flags that exist.
func TestHelpExamples(t *testing.T) {
	root := newRoot(newCLI(t).env)
	for _, cmd := range append(root.Commands(), root) {
		for l := range strings.Lines(cmd.Example) {
			text, _, _ := strings.Cut(l, "#")
			text, _, _ = strings.Cut(text, "&&")
			text, _, _ = strings.Cut(text, " > ")
			_, text, ok := strings.Cut(strings.NewReplacer("<(", "", ")", "").Replace(text), "dpserve ")
			require.True(t, ok, "%q of help %s does not call dpserve", l, cmd.Name())
			again := newRoot(newCLI(t).env)
			found, rest, err := again.Find(arrange(again, strings.Fields(text)))
			require.NoError(t, err, text)
			require.NoError(t, found.ParseFlags(rest), text)
			if found.Args != nil {
				require.NoError(t, found.Args(found, found.Flags().Args()), text)
			}
		}
	}
}

// TestFilesOfThePagesAreValid: blocks of language yaml are application files, or parts of one application.
func TestFilesOfThePagesAreValid(t *testing.T) {
	const head = "applications:\n  - name: demo\n    model: {id: demo}\n    engine: {kind: sim}\n"
	found := 0
	for _, page := range pages(t) {
		for _, b := range blocksOf(t, page) {
			if b.language != "yaml" {
				continue
			}
			found++
			text := b.text
			if !strings.Contains("\n"+text, "\napplications:") {
				text = head + "    " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n    ") + "\n"
			}
			_, warnings, err := app.Parse(app.Default(), page, []byte(text))
			require.NoError(t, err, "%s:%d", page, b.line)
			assert.Empty(t, warnings, "%s:%d", page, b.line)
		}
	}
	assert.GreaterOrEqual(t, found, 4)
}

// TestGoOfThePages: the lines of a block of language go are lines of an example of package client, which is
// compiled.
func TestGoOfThePages(t *testing.T) {
	examples := readPage(t, "client/example_test.go") + readPage(t, "client/example_admin_test.go")
	examples = strings.Join(strings.Fields(examples), " ")
	for _, page := range pages(t) {
		for _, b := range blocksOf(t, page) {
			if b.language != "go" {
				continue
			}
			for line := range strings.Lines(b.text) {
				line, _, _ = strings.Cut(line, "//")
				assert.Contains(t, examples, strings.Join(strings.Fields(line), " "), "%s:%d", page, b.line)
			}
		}
	}
}

// runLockstepPage runs the example of docs/lockstep.md for a second: both policies answer the load, and the
// node that the script starts ends with it. With DPSERVE_ACCEPTANCE=1 it takes long enough to compare them.
func runLockstepPage(t *testing.T, blocks []block) {
	t.Helper()
	if _, err := exec.LookPath("awk"); err != nil {
		t.Skip("awk is not installed")
	}
	require.Len(t, blocks, 1)
	commands := blocks[0].commands()
	require.Len(t, commands, 1)
	rate, duration, warmup := "20", "1s", "0s"
	isLong := os.Getenv("DPSERVE_ACCEPTANCE") != ""
	if isLong {
		rate, duration, warmup = "30", "12s", "3s"
	}
	temp := t.TempDir()
	out, talk := runLine(t, repository, commands[0].text, "DPSERVE="+asDpserve(t), "TMPDIR="+temp,
		"PORTS="+enginePorts(t, "127.0.0.1"), "RATE="+rate, "DURATION="+duration, "WARMUP="+warmup)
	load := ": 1,024 tokens in, 64 out, " + rate + " requests/s for " + duration + "\n"
	assert.Equal(t, "lmetric-1"+load+"cohorts"+load, talk)
	number := regexp.MustCompile(`\d+\.\d+`)
	masked := func(text string) string {
		return regexp.MustCompile(`  +`).ReplaceAllString(number.ReplaceAllString(text, "N"), " ")
	}
	assert.Contains(t, masked(readPage(t, blocks[0].page)), masked(strings.TrimSpace(out)))
	if gaps := number.FindAllString(out, 2); isLong && assert.Len(t, gaps, 2, out) {
		t.Log(out)
		alone, errAlone := strconv.ParseFloat(gaps[0], 64)
		cohorts, errCohorts := strconv.ParseFloat(gaps[1], 64)
		require.NoError(t, errors.Join(errAlone, errCohorts))
		assert.LessOrEqual(t, cohorts, alone/2, "the median gap between tokens")
	}
	left, err := os.ReadDir(temp)
	require.NoError(t, err)
	assert.Empty(t, left, "the script leaves files behind")
}
