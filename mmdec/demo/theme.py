"""The page's colours and fonts: Gradio's soft theme in teal, with contrasts of at least WCAG's AA."""

from __future__ import annotations

from gradio.themes import Base, Soft

FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif"]  # nothing is fetched
COLOURS = {  # Gradio's own teal is too light below white letters, and on white
    "background_fill_primary": "*neutral_50",  # the soft theme's own, which `set` forgets
    "block_label_text_color": "*primary_800",
    "block_label_background_fill_dark": "*primary_700",
    "block_title_text_color": "*primary_800",
    "block_info_text_color": "*neutral_600",
    "body_text_color_subdued": "*neutral_600",
    "button_primary_background_fill": "*primary_700",
    "button_primary_background_fill_dark": "*primary_700",
    "button_primary_background_fill_hover": "*primary_800",
    "button_primary_background_fill_hover_dark": "*primary_800",
    "checkbox_label_background_fill_selected": "*primary_700",
    "checkbox_label_background_fill_selected_dark": "*primary_700",
    "checkbox_background_color_selected": "*primary_900",
    "checkbox_background_color_selected_dark": "*primary_900",
    "link_text_color": "*primary_700",
    "link_text_color_dark": "*primary_300",
}


def theme() -> Base:
    """What `launch` is given. Colours that have no name there are in style.css."""
    soft = Soft(primary_hue="teal", font=FONTS, font_mono=["ui-monospace", "DejaVu Sans Mono", "monospace"])
    return soft.set(**COLOURS)
