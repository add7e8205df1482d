package app

import (
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/routing"
)

// Bounds of an application. Together with those in the tags they keep sums and products from overflowing.
const (
	// MaxDPSize is the largest data-parallel group.
	MaxDPSize = 4096
	// MaxRanks is the largest number of ranks of an application.
	MaxRanks = 65_536

	maxApplications = 1_000
	maxListItems    = 1_000 // of other lists than ranks
	maxNameBytes    = 256   // of a model id, an alias, an adapter
)

// key is one key of a map of the file: a field of a struct, with what its tags say.
type key struct {
	name     string
	field    []int    // index of the field
	wanted   string   // the value in the words of a fault
	number   *bounds  // nil for other values
	format   *format  // of a text, or of the keys of a map of texts
	words    []string // the only texts, nil if there are others
	later    []string // words that are not supported yet
	isLater  bool     // the key itself is not supported yet: a fault, never ignored silently
	standard string   // the default, "" for the zero value
	unset    string   // what a missing key means, for people
	need     string   // hint if the key is missing, "" if it may be missing
}

// bounds is the range of a number.
type bounds struct {
	low, high float64
	above     bool // low itself is too small
}

func (b *bounds) hold(v float64) bool { return v >= b.low && v <= b.high && (v > b.low || !b.above) }

// format is a form of text that tags name.
type format struct {
	pattern *regexp.Regexp
	most    int // bytes
	wanted  string
}

func (f *format) fits(s string) bool { return len(s) <= f.most && f.pattern.MatchString(s) }

var formats = map[string]*format{
	"label": {
		regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`), 63,
		"a DNS label: 1 to 63 of a-z, 0-9 and -, not at the ends",
	},
	"path": { // segments of one or two dots would be resolved on the way
		regexp.MustCompile(`^(/|(/(\.{0,2}[A-Za-z0-9_~-]|\.{3})[A-Za-z0-9._~-]*)+)$`), MaxFileBytes,
		"/ or a path like /team/chat without a slash at its end",
	},
	"served": { // what clients send as "model"
		regexp.MustCompile(`^[\p{L}\p{M}\p{N}\p{P}\p{S}]+$`), maxNameBytes,
		"1 to 256 visible characters without blanks",
	},
	"file": {
		regexp.MustCompile(`^/[^\x00-\x1f]*$`), 4096,
		"the absolute path of a file, such as /etc/dpserve/engine.key",
	},
	"word": {regexp.MustCompile(`(?s)^.`), MaxFileBytes, "a word of the command"},
	"variable": {
		regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`), MaxFileBytes, "the name of an environment variable",
	},
	"address": {
		regexp.MustCompile(`^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$`), MaxFileBytes, "HOST:PORT",
	},
	"node": {labelName, maxLabelBytes, "the id of a dpserve node"},
	"node label": {
		labelName, maxLabelBytes, "a label: letters, digits and . _ / - inside",
	},
}

const maxLabelBytes = 128

// Label makes the name of an application from text: lower case, with dashes. prefix comes before a name that
// would begin with a digit, or be empty.
func Label(text, prefix string) string {
	text = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(text))
	cut := func(s string) string { return strings.Trim(s[:min(len(s), formats["label"].most)], "-") }
	if text = cut(text); text == "" || text[0] <= '9' {
		text = prefix + "-" + text
	}
	return cut(text)
}

var labelName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$`)

// wordLists are the lists that tags name.
var wordLists = map[string][]string{
	"strategy": {StrategyPack, StrategyStrictPack, StrategySpread, StrategyStrictSpread},
	"kind":     {string(KindSim), string(KindVLLM), string(KindSGLang), string(KindAttach)},
	"policy":   routing.Names(),
}

// replacements maps policies of other projects and papers to the policy that does their work here.
var replacements = map[string]string{
	"lmetric": "lmetric-1", "sticky": "mex", "min-ttft": "mex with params: {goal: latency}",
	"chwbl": "session-affinity",
}

// times are the ranges of times that tags name. They end at 30 days, so that no duration overflows.
var times = map[string]string{
	"seconds":      "seconds above 0 to 2592000",
	"seconds or 0": "seconds from 0 to 2592000",
}

var numberRange = regexp.MustCompile(` (above|from) (\d+) to (\d+)$`)

// keysOf lists the keys of a struct type in the order of its fields, keys of later versions last.
func keysOf(t reflect.Type) []key {
	var out, later []key
	for _, f := range reflect.VisibleFields(t) {
		tag := f.Tag
		if f.Name == "_" {
			for _, name := range strings.Fields(tag.Get("later")) {
				later = append(later, key{name: name, isLater: true})
			}
			continue
		}
		name, _, _ := strings.Cut(tag.Get("json"), ",")
		if name == "" || tag.Get("is") == "-" {
			continue
		}
		k := key{
			name: name, field: f.Index, wanted: tag.Get("is"), format: formats[tag.Get("is")],
			later: strings.Fields(tag.Get("later")), standard: tag.Get("default"), unset: tag.Get("unset"),
			need: tag.Get("need"),
		}
		if t := times[k.wanted]; t != "" {
			k.wanted = t
		}
		if found := numberRange.FindStringSubmatch(k.wanted); found != nil {
			k.number = &bounds{above: found[1] == "above"}
			k.number.low, _ = strconv.ParseFloat(found[2], 64) // the pattern accepts digits only
			k.number.high, _ = strconv.ParseFloat(found[3], 64)
		}
		if words := tag.Get("words"); words != "" {
			if k.words = wordLists[words]; k.words == nil {
				k.words = strings.Split(words, " | ")
			}
			k.wanted = strings.Join(k.words, " | ")
		}
		out = append(out, k)
	}
	return append(out, later...)
}

// setDefaults fills in the defaults of a struct and of the structs in it.
func setDefaults(v reflect.Value) {
	for _, k := range keysOf(v.Type()) {
		if k.isLater {
			continue
		}
		switch f := v.FieldByIndex(k.field); {
		case f.Kind() == reflect.Struct:
			setDefaults(f)
		case k.standard != "":
			k.reset(f)
		}
	}
}

func (k *key) reset(field reflect.Value) {
	switch {
	case k.standard == "":
		field.SetZero()
	case field.Kind() == reflect.String:
		field.SetString(k.standard)
	case field.Kind() == reflect.Bool:
		field.SetBool(k.standard == "true")
	default:
		n, _ := strconv.ParseFloat(k.standard, 64) // a test reads every default
		field.Set(reflect.ValueOf(n).Convert(field.Type()))
	}
}

func findKey(keys []key, name string) *key {
	if i := slices.IndexFunc(keys, func(k key) bool { return k.name == name }); i >= 0 {
		return &keys[i]
	}
	return nil
}
