package doctor

import (
	"cmp"
	"strconv"
	"strings"
)

// Engine is the program that an application of the file starts.
type Engine struct {
	App     string
	Kind    string // vllm, sglang; another one has no version to check
	Program string // as the file or the kind names it
	Path    string // where it was found
	Error   string // why it was not; "" = it was
	Version string // "" = not found out
	Unknown string // why the version is not known
}

// versionRange are the versions of an engine kind that dpserve works with.
type versionRange struct {
	oldest string // older ones lack flags, routes or events that dpserve needs
	seen   string // the newest one that was tried; "" = none was run
	pip    string // what installs it
}

// supported are the versions by engine kind. vLLM: 0.28 and 0.32 were run. SGLang: the names of its metrics
// are those of 0.5.4 and later; none was run.
func supported(kind string) (versionRange, bool) {
	r, ok := map[string]versionRange{
		"vllm":   {oldest: "0.28.0", seen: "0.32", pip: "vllm==0.32.0"},
		"sglang": {oldest: "0.5.4", pip: `"sglang>=0.5.4"`},
	}[kind]
	return r, ok
}

func checkEngines(f *Facts) []Finding {
	var out []Finding
	for i := range f.Engines {
		out = append(out, f.Engines[i].judge())
	}
	return out
}

func (e *Engine) judge() Finding {
	out := &findings{check: "engine"}
	r, known := supported(e.Kind)
	where := e.App + ": " + cmp.Or(e.Path, e.Program)
	hint := "write its whole path as engine.command"
	if known {
		hint += ", or install it: `pip install " + r.pip + "`"
	}
	switch {
	case e.Error != "":
		out.fail(hint, "%s: %s", where, e.Error)
	case !known:
		out.ok("%s is there", where)
	case e.Version == "":
		out.warn("see what `"+e.Program+" --version` says", "%s: its version is not known: %s", where,
			e.Unknown)
	case compareVersions(e.Version, r.oldest) < 0:
		out.fail("`pip install "+r.pip+"`", "%s is %s %s; dpserve works with %s and later", where, e.Kind,
			e.Version, r.oldest)
	case r.seen != "" && !isWithin(e.Version, r.seen) && compareVersions(e.Version, r.seen) > 0:
		out.warn("watch the first ranks; if they do not get ready, `pip install "+r.pip+"`",
			"%s is %s %s; the newest version that was tried is %s", where, e.Kind, e.Version, r.seen)
	default:
		out.ok("%s is %s %s", where, e.Kind, e.Version)
	}
	return out.list[0]
}

// compareVersions compares the leading numbers of two versions: 0.32.0+cpu and 0.32.0rc1 equal 0.32.0.
func compareVersions(a, b string) int {
	x, y := numbersOf(a), numbersOf(b)
	for i := range max(len(x), len(y)) {
		if c := cmp.Compare(at(x, i), at(y, i)); c != 0 {
			return c
		}
	}
	return 0
}

// isWithin reports whether a version is one of a line: 0.32.1 is one of 0.32.
func isWithin(version, line string) bool {
	x, y := numbersOf(version), numbersOf(line)
	for i := range y {
		if at(x, i) != y[i] {
			return false
		}
	}
	return true
}

func at(numbers []int, i int) int {
	if i < len(numbers) {
		return numbers[i]
	}
	return 0
}

// numbersOf returns the leading numbers of a version: 0.28.1.dev12 gives 0, 28, 1.
func numbersOf(version string) []int {
	var out []int
	for part := range strings.SplitSeq(strings.TrimPrefix(version, "v"), ".") {
		digits := part
		if end := strings.IndexFunc(part, func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
			digits = part[:end]
		}
		n, err := strconv.Atoi(digits)
		if err != nil {
			return out
		}
		if out = append(out, n); digits != part {
			return out
		}
	}
	return out
}

// Model is what an application of the file loads.
type Model struct {
	App    string
	Source string // as the file names it
	Folder string // where its files are; "" = it is not on this machine
	Error  string // why they cannot be read

	// of a model that is not on this machine
	Remote  bool   // its name is that of a hub, so that the engine downloads it
	Offline string // setting that forbids it, like HF_HUB_OFFLINE=1

	// of a folder
	Missing     []string // files that its index names and that are not there
	Damaged     []string // files that are cut or no weights, with what is wrong
	Files       int      // with weights
	Bytes       uint64   // of Files
	NoTokenizer bool
	Dummy       bool // engine.args loads no weights
}

func checkModels(f *Facts) []Finding {
	var out []Finding
	for i := range f.Models {
		out = append(out, f.Models[i].judge()...)
	}
	return out
}

func (m *Model) judge() []Finding {
	out := &findings{check: "model"}
	download := "download it again: `hf download " + m.Source + "`"
	if !m.Remote {
		download = "copy the missing files again from where the model came from"
	}
	where := m.App + ": " + m.Source
	if m.Folder != "" {
		where = m.App + ": " + m.Folder
	}
	switch {
	case m.Error != "":
		out.fail("write a folder with a config.json, or the name of a model of a hub, as model.source",
			"%s: %s", where, m.Error)
		return out.list
	case m.Folder == "" && m.Remote && m.Offline != "":
		out.fail("download it first: `hf download "+m.Source+"`, or remove the setting",
			"%s is not in the cache, and %s forbids the engine to download it", where, m.Offline)
		return out.list
	case m.Folder == "" && m.Remote:
		out.warn("`hf download "+m.Source+"` before the first start, or raise engine.startup_timeout_s",
			"%s is not in the cache: each engine downloads it at its start", where)
		return out.list
	case m.Folder == "":
		out.ok("%s is no local folder: the engine itself finds it", where)
		return out.list
	}
	if len(m.Missing) > 0 {
		out.fail(download, "%s lacks %s of its index: %s", where, formatCount(len(m.Missing), "file"),
			some(m.Missing))
	}
	if len(m.Damaged) > 0 {
		out.fail(download, "%s: %s", where, some(m.Damaged))
	}
	if m.Files == 0 && len(m.Missing) == 0 && !m.Dummy {
		out.fail(download+", or write load_format: dummy into engine.args", "%s has no weights", where)
	}
	if m.NoTokenizer {
		out.warn("copy tokenizer.json and tokenizer_config.json next to config.json", "%s has no tokenizer",
			where)
	}
	if m.Files == 0 {
		return out.orOK("%s is readable; its weights are not loaded", where)
	}
	return out.orOK("%s is readable and complete: %s, %s", where, formatCount(m.Files, "file"),
		formatBytes(m.Bytes))
}
