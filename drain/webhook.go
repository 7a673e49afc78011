package drain

import (
	"strings"

	"github.com/gpuslice/gpuslice/config/sanitize"
)

// longestDenial is how many characters of a webhook's text a message shows.
const longestDenial = 200

// The API server's words for an eviction that an admission webhook denies, whatever status the webhook chose: `admission webhook "a.example" denied the
// request: why`.
const (
	webhookPrefix = `admission webhook "`
	webhookDenied = `" denied the request`
)

func denied(err error) bool {
	_, _, is := denialOf(err)
	return is
}

func denialOf(err error) (webhook, why string, is bool) {
	_, rest, is := strings.Cut(err.Error(), webhookPrefix)
	if !is {
		return "", "", false
	}
	webhook, why, is = strings.Cut(rest, webhookDenied)
	return webhook, strings.TrimPrefix(strings.TrimPrefix(why, ":"), " "), is
}

// deniedBy names the webhook that denies an eviction, and its words.
func deniedBy(err error) Verdict {
	webhook, why, _ := denialOf(err)
	v := Verdict{State: Blocked, Webhook: sanitize.Cut(webhook, longestDenial), denial: why}
	v.Message = "webhook " + v.Webhook + " denies its eviction"
	if why != "" {
		v.Message += ": " + sanitize.Cut(why, longestDenial)
	}
	return v
}
